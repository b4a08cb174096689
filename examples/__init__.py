"""Small apps behind the guard. Each runs with uvicorn and is tested with the documentation."""
