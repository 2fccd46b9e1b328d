"""Commands for basins, streams, access tokens and usage."""
