"""What a client can ask for, its checks, and its text in an image's file.

Begin with `drawing`, whose fields all interfaces of the server share.
"""
