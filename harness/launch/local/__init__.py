"""The local launcher: ranks forked from a warm server, and nobody left behind.

launcher.py asks, fork_server.py forks, conversation.py keeps both in step, processes.py ends
descendants, rank_log.py bounds what is printed. Imports record and base.
"""
