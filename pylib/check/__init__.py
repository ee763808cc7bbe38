"""Random specs against a definition that shares no code with the compiler: `lowbit check`."""
