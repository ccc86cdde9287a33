"""KV records beyond the device: on disk for days, and in host memory."""
