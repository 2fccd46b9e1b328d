"""HTTP without any protocol of ours: listener, requests, responses, limits, routing, CORS."""
