"""What a client asks for, checked, and told as text in an image's file.

Begin with `drawing`, whose fields all interfaces of the server share.
"""
