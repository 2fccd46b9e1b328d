package main

import (
	"encoding/binary"
	"errors"
	"math"
)

// The wire format of google.protobuf.Struct, whose values are doubles, text, truths, null, lists and maps.

var errCut = errors.New("a message is cut, or of an unknown form")

func varint(data []byte) (uint64, []byte, error) {
	value, size := binary.Uvarint(data)
	if size <= 0 {
		return 0, nil, errCut
	}
	return value, data[size:], nil
}

// fields calls take with the number and the value of every field: uint64, float64 or []byte.
func fields(data []byte, take func(number int, value any) error) error {
	for len(data) > 0 {
		tag, rest, err := varint(data)
		if err != nil {
			return err
		}
		var value any
		switch tag & 7 {
		case 0:
			number, after, err := varint(rest)
			if err != nil {
				return err
			}
			value, data = number, after
		case 1:
			if len(rest) < 8 {
				return errCut
			}
			value, data = math.Float64frombits(binary.LittleEndian.Uint64(rest)), rest[8:]
		case 2:
			size, after, err := varint(rest)
			if err != nil || size > uint64(len(after)) {
				return errCut
			}
			value, data = after[:size], after[size:]
		default:
			return errCut
		}
		if err := take(int(tag>>3), value); err != nil {
			return err
		}
	}
	return nil
}

func structOf(data []byte) (row, error) {
	found := row{}
	return found, fields(data, func(_ int, entry any) error {
		var name string
		var value any
		err := fields(entry.([]byte), func(number int, part any) (err error) {
			if number == 1 {
				name = string(part.([]byte))
			} else {
				value, err = valueOf(part.([]byte))
			}
			return err
		})
		found[name] = value
		return err
	})
}

func valueOf(data []byte) (any, error) {
	var found any
	err := fields(data, func(number int, value any) (err error) {
		switch number {
		case 1:
			found = nil
		case 2:
			found = value
		case 3:
			found = string(value.([]byte))
		case 4:
			found = value.(uint64) != 0
		case 5:
			found, err = structOf(value.([]byte))
		case 6:
			list := []any{}
			err = fields(value.([]byte), func(_ int, item any) error {
				decoded, err := valueOf(item.([]byte))
				list = append(list, decoded)
				return err
			})
			found = list
		}
		return err
	})
	return found, err
}
