"""What people see of a run, made from its log and status only: text, progress, plots, `top`."""
