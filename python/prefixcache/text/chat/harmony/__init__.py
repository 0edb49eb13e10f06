"""gpt-oss's format of a chat: messages in channels, with headers that say who speaks to whom."""
