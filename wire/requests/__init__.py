"""What every server refuses before a handler: unreadable bytes, and numbers no column holds."""
