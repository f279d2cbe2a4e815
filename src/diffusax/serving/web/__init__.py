"""The HTTP server: APIs that clients speak, jobs, and the page."""
