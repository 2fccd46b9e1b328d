
TRUNCATE[<nil> <nil>]