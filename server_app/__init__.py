"""The server: who is there, what each round sends and makes of the replies, and what is written down."""
