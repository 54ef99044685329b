"""What a page shows of a run, live or afterwards, and the page's own files: no web server."""
