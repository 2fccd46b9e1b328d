"""What runs in the processes under attack: the server, its clock and its disk; and an S3 server."""
