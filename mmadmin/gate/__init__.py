"""The gate: the OpenAI-compatible front that knows keys and routes. No Django, no database."""
