"""What goes over the wire: requests from bytes, answers to bytes. No ray, no torch."""
