"""Who is signed in: single sign-on, sessions, the address that a request came from."""
