"""What the pages stand on: their addresses, forms, live updates and shared fragments."""
