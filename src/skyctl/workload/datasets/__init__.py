"""Records to fine-tune on (chats, prompts, texts, token ids): read, masked, packed, ordered."""
