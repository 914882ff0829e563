"""Many servers behind one address that says which of them to ask: ``radix-cache route``."""
