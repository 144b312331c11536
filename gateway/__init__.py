"""The gateway: text in, text out. It turns text into token ids and back and decides nothing."""
