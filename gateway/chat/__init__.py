"""Chats: conversations, tools and their calls, reasoning, and chat templates."""
