-- One customer buys one thing, for pgbench: two changes in one transaction.
\set customer random(1, 1000)
\set price random(100, 9999)
BEGIN;
INSERT INTO orders (customer_id, item, price_cents) VALUES (:customer, 'item ' || :price, :price);
UPDATE customers SET balance_cents = balance_cents - :price WHERE id = :customer;
COMMIT;
