"""Many guarded requests in one."""
