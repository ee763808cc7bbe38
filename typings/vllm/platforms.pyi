class Platform:
    def is_cpu(self) -> bool: ...

current_platform: Platform
