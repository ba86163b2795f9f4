"""What configure does on the driver: endpoints, layout, validation and warnings."""
