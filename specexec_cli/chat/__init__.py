"""What a chat is, apart from how it looks: conversation, transcript, commands, turns."""
