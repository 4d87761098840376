"""Programs that run in environments of their own; nothing in mmadmin imports them."""
