"""What every other shelf may use: errors, files, strict JSON, validation and the settings of a
run.
"""
