"""Previews and checks of archives whose files are not trusted to be small: `process` runs `reads`."""
