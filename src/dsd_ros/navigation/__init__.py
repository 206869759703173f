"""From verified text to motion: action grammar, motion controller, the run, the safety supervisor."""
