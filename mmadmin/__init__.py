"""mmadmin: reproducible, reversible, shareable serving of large open models."""
