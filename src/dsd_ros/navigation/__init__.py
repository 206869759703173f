"""From verified text to motion: action grammar, motion controller, watchdog."""
