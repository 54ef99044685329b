"""The client: forms pipelines, keeps a trainer for each, owns the data server, coordinates the rounds."""
