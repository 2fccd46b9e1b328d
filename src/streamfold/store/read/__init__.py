"""The read path: read requests, the cursor that serves them, and seeks by timestamp."""
