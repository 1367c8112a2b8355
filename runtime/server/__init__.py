"""The server: HTTP in front, a scheduler process and a detokenizer process behind it."""
