"""Programs for the processes under attack: a server with its clock and disk, and an S3 server."""
