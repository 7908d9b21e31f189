"""Environments that live elsewhere: servers of the user's own, and of OpenEnv.

described_tools   the tools that a server describes, checked
http_caller       one episode's session at a server of our own protocol (agent=http)
openenv_caller    one episode's session at a server of OpenEnv (agent=openenv)
service           requests with deadlines, from threads; what every failure is called
"""
