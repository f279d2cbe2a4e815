"""What a client can ask for, its checks, and its text in an image's file.

Begin with `generation`, whose fields all interfaces of the server share.
"""
