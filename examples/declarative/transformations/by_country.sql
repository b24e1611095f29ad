CREATE MATERIALIZED VIEW by_country AS
SELECT value.country, count(*) AS orders, sum(value.amount) AS amount
FROM orders
WHERE kind = 'record'
GROUP BY value.country;
