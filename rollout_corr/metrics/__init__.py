"""Statistics on the device, metrics on the host, and the schema that orders them."""
