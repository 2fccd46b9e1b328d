"""What exists: basins, streams, forks, snapshots, access tokens and documents."""
