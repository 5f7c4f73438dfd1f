"""Keys and values outside of the device: blocks in host memory, and connectors that store them elsewhere."""
