"""Stream clients: the seam, its implementations, and reads that survive disconnects."""
