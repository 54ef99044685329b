"""The dashboard's web server, in the monitor's process: the only part of shoal that knows starlette and uvicorn."""
