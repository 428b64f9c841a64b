"""Files: atomic writes, and strict readers of files from untrusted sources."""
