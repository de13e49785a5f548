-- Only in east.

INSERT INTO customers SELECT id, 'customer ' || id, 100000 FROM generate_series(1, 1000) AS id;
