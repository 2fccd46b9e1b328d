"""The catalog: basins, streams, forks, snapshots, access tokens and documents."""
