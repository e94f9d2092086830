"""The command line: main.py has the table of commands, the other files the commands."""
