"""One guarded request, from its head to the reply."""
