"""What a spotlight found, shown: pictures in the terminal and figures as files."""
