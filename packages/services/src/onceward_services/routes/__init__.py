"""Route submissions: a request for a walk is accepted at once, and a job plans the route."""
