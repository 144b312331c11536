"""What makes a chat more than text: tools, their calls, and reasoning apart from the answer."""
