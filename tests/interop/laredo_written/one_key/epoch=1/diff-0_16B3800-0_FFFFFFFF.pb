
TRUNCATE<nil>